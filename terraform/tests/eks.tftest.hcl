# The real provider with keys that open nothing: it renders every policy while planning, offline.
provider "aws" {
  region                      = "eu-west-1"
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

override_data {
  target = data.aws_caller_identity.current
  values = { account_id = "111122223333" }
}

# ARNs that a plan does not know yet, so that what refers to them can be compared.
override_resource {
  target          = aws_iam_policy.access["reader"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/reader" }
}

override_resource {
  target          = aws_iam_policy.access["writer"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/writer" }
}

override_resource {
  target          = aws_iam_role.eks["engine"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:role/engine" }
}

override_resource {
  target          = aws_iam_role.eks["canary"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:role/canary" }
}

run "eks" {
  command = plan

  variables {
    name   = "cache"
    prefix = "team/s3kv"
    tags   = { Team = "inference" }
    pod_identities = {
      engine = { cluster_name = "gpu", namespace = "inference", service_account = "vllm" }
    }
    irsa = {
      canary = {
        oidc_provider_arn = "arn:aws:iam::111122223333:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/ABC"
        namespace         = "inference"
        service_account   = "canary"
        access            = "reader"
      }
    }
    permissions_boundary_arn = "arn:aws:iam::111122223333:policy/boundary"
    gateway_endpoint = {
      vpc_id             = "vpc-1"
      route_table_ids    = ["rtb-1", "rtb-2"]
      extra_bucket_names = ["models", "al2023-repos-*"]
    }
  }

  assert {
    condition = jsondecode(aws_vpc_endpoint.this[0].policy) == {
      Version = "2012-10-17"
      Statement = [
        {
          Sid       = "List"
          Effect    = "Allow"
          Principal = "*"
          Action    = "s3:ListBucket"
          Resource  = "arn:aws:s3:::cache"
        },
        {
          Sid       = "Objects"
          Effect    = "Allow"
          Principal = "*"
          Action    = ["s3:PutObject", "s3:GetObject", "s3:DeleteObject"]
          Resource  = "arn:aws:s3:::cache/team/s3kv/*"
        },
        {
          Sid       = "ImageLayers"
          Effect    = "Allow"
          Principal = "*"
          Action    = "s3:GetObject"
          Resource  = "arn:aws:s3:::prod-eu-west-1-starport-layer-bucket/*"
        },
        {
          Sid       = "ExtraBuckets"
          Effect    = "Allow"
          Principal = "*"
          Action    = ["s3:ListBucket", "s3:GetObject"]
          Resource = [
            "arn:aws:s3:::models/*",
            "arn:aws:s3:::models",
            "arn:aws:s3:::al2023-repos-*/*",
            "arn:aws:s3:::al2023-repos-*",
          ]
        },
      ]
    }
    error_message = "endpoint: ${aws_vpc_endpoint.this[0].policy}"
  }

  assert {
    condition = jsondecode(aws_iam_role.eks["engine"].assume_role_policy) == {
      Version = "2012-10-17"
      Statement = [{
        Effect    = "Allow"
        Principal = { Service = "pods.eks.amazonaws.com" }
        Action    = ["sts:TagSession", "sts:AssumeRole"]
        Condition = {
          StringEquals = {
            "aws:RequestTag/eks-cluster-arn"            = "arn:aws:eks:eu-west-1:111122223333:cluster/gpu"
            "aws:RequestTag/kubernetes-namespace"       = "inference"
            "aws:RequestTag/kubernetes-service-account" = "vllm"
          }
        }
      }]
    }
    error_message = "trust by Pod Identity: ${aws_iam_role.eks["engine"].assume_role_policy}"
  }

  assert {
    condition = jsondecode(aws_iam_role.eks["canary"].assume_role_policy) == {
      Version = "2012-10-17"
      Statement = [{
        Effect    = "Allow"
        Principal = { Federated = "arn:aws:iam::111122223333:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/ABC" }
        Action    = "sts:AssumeRoleWithWebIdentity"
        Condition = {
          StringEquals = {
            "oidc.eks.eu-west-1.amazonaws.com/id/ABC:aud" = "sts.amazonaws.com"
            "oidc.eks.eu-west-1.amazonaws.com/id/ABC:sub" = "system:serviceaccount:inference:canary"
          }
        }
      }]
    }
    error_message = "trust by IRSA: ${aws_iam_role.eks["canary"].assume_role_policy}"
  }

  assert {
    condition = { for name, role in aws_iam_role.eks : name => [role.name, role.description, role.permissions_boundary] } == {
      engine = ["cache-engine", "s3kv as a writer of cache", "arn:aws:iam::111122223333:policy/boundary"]
      canary = ["cache-canary", "s3kv as a reader of cache", "arn:aws:iam::111122223333:policy/boundary"]
    }
    error_message = "there must be one role for each identity, within the boundary"
  }

  assert {
    condition     = alltrue([for role in aws_iam_role.eks : length(role.inline_policy) == 0 && length(role.managed_policy_arns) == 0])
    error_message = "a role must have no policies but those attached to it"
  }

  assert {
    condition = { for name, attached in aws_iam_role_policy_attachment.eks : name => [attached.role, attached.policy_arn] } == {
      engine = ["cache-engine", aws_iam_policy.access["writer"].arn]
      canary = ["cache-canary", aws_iam_policy.access["reader"].arn]
    }
    error_message = "each role must have the policy of the access that was asked for"
  }

  assert {
    condition = jsonencode([for association in aws_eks_pod_identity_association.this : {
      for name in setsubtract(keys(association), ["association_arn", "association_id", "id", "region", "tags_all", "external_id"]) :
      name => association[name] if association[name] != null
      }]) == jsonencode([{
      cluster_name    = "gpu"
      namespace       = "inference"
      service_account = "vllm"
      role_arn        = aws_iam_role.eks["engine"].arn
      tags            = aws_s3_bucket.this[0].tags
    }])
    error_message = "Pod Identity must give the service account its role"
  }

  assert {
    condition = [
      aws_vpc_endpoint.this[0].service_name,
      aws_vpc_endpoint.this[0].vpc_endpoint_type,
      aws_vpc_endpoint.this[0].vpc_id,
      join(" ", sort(aws_vpc_endpoint.this[0].route_table_ids)),
    ] == ["com.amazonaws.eu-west-1.s3", "Gateway", "vpc-1", "rtb-1 rtb-2"]
    error_message = "the endpoint must be S3's gateway in these route tables"
  }

  assert {
    condition     = output.role_arns == { for name, role in aws_iam_role.eks : name => role.arn }
    error_message = "the roles must be told by their names"
  }
}
